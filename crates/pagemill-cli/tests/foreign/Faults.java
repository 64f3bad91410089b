/** Causes faults that the Java virtual machine handles: null references and stack overflows. */
public class Faults {
    int value;
    static int depth;

    static int read(Faults of) {
        return of.value;
    }

    static void recurse() {
        depth++;
        recurse();
    }

    public static void main(String[] arguments) throws Exception {
        int caught = 0;
        Faults some = new Faults();
        for (int round = 0; round < 200000; round++) {
            try {
                read(round % 100 == 99 ? null : some);
            } catch (NullPointerException expected) {
                caught++;
            }
        }
        for (int round = 0; round < 3; round++) {
            try {
                recurse();
            } catch (StackOverflowError expected) {
                caught++;
            }
        }
        System.gc();
        System.out.println(caught);
    }
}
